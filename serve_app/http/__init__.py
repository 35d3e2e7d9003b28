"""HTTP: routes, events, request ids, and the OpenAPI description."""
