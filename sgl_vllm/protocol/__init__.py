"""What client and server say to each other, known to both and owned by neither."""
