"""Tables, plots and pages that commands print and write."""
