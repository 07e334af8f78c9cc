"""Commands on what was measured: machines and links, predictions against runs, constants fitted to them."""
