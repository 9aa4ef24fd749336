"""What people build with: geometry, linear algebra, parametrizations, layers, losses, export and optimizers."""
