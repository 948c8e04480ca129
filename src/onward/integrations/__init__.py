"""Integrations with other libraries. Each module needs its library, which an extra installs."""
