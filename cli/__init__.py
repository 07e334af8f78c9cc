"""The `meshplan` command."""
