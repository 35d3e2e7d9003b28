"""The Ray Serve deployments: prefill and decode pools, the monolith, the stream router and the controller.

Their classes have Serve's hooks, and hold the parts that do the work: `runtime` (name, metrics, reports to the
controller), `engine_host` (an engine with its breaker, weights and records), `prefill_pool`, `http_front`. All ask the
controller through `controller_client`. Read `pools` first; it shows how they are put together.
"""
