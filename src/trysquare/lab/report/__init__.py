"""A run as one HTML page that opens without a network."""

from trysquare.lab.report.page import recipe_images, write_report

__all__ = ["recipe_images", "write_report"]
