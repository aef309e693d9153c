"""One model server: its requests, errors, rate limits and prices, and the checks that it still works."""
