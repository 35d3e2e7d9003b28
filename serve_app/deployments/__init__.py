"""The Ray Serve deployments: prefill and decode pools, the monolith, the stream router and the controller."""
