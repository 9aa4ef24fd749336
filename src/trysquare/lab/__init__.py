"""What people run: data, models, recipes, training, reports and the command line."""
