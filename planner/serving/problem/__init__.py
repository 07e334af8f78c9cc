"""The question: spec, requests, engines, layouts."""
