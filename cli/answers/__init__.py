"""Answers as documents, the same on the command line and over HTTP."""
