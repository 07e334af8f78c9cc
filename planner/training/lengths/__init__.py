"""Documents of different lengths under one training plan: what ways to deal them out are worth."""
