"""What passes between server and sites: messages, and local models waiting on disk. No workflow."""
