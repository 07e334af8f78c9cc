"""How to make images and videos with a diffusion transformer: degrees, batch, replicas."""
