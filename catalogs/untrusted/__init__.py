"""The one door for what comes from outside: files, archives and texts, with their limits, before they are believed."""
