"""Commands of the project's maintainers. Not in the images."""
