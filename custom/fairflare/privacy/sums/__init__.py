"""Add up what sites send so that the server learns the sum alone: numbers of a ring under masks that cancel."""
