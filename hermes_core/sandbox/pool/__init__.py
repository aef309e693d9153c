"""The pool, which leases the slots of sandboxes, and its parts."""
