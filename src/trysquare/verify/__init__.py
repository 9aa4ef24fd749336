"""What people trust: spectra, Lipschitz bounds, audits, certificates, and attacks on them."""
