"""A replica's answer to alarms: its breaker turns speculation off; canary requests decide when it comes on again."""
