"""What single operators take on a device: matrix products, and what passes through memory."""
