"""One model server: its errors, its rate limits, whether it works, and what it costs."""
