"""The audit of any server over HTTP: probes of its contract, counters, lengths, parameters and twins."""
