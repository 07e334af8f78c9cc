"""What ``/openapi.json`` says: of resources, of the bodies that they read, and the whole document."""
