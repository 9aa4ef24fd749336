"""A run as one HTML page that opens without a network."""

from trysquare.report.page import write_report
from trysquare.report.pictures import recipe_images

__all__ = ["recipe_images", "write_report"]
