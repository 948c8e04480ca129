"""Onward behind the interfaces of other libraries. Each module needs its library, an extra of its own."""
