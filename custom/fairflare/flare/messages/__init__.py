"""FLARE's messages: what they hold and how they travel."""
