"""Dense decoder models, on one device."""
