"""How to serve a model within its SLO at least cost?"""
