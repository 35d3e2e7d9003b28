"""Dense decoder models of the Llama family, on one device."""
