"""How different the sites' images are: the document, its sentences and its page."""
