"""The application's configuration: one YAML file that is also a Ray Serve config."""
