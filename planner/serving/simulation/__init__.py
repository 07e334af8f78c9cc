"""Requests through workers over time: event-skipping, with a reference implementation."""
