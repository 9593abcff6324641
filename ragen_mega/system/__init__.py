"""The process among others: paths of users, its outputs, addresses and requests to servers."""
