"""Define the messages between server and sites, and stage local models at the server."""
