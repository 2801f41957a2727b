"""The version, in one place."""

__version__ = "0.1.0"
"""The version of qualms that is installed.

Example:
    ```python
    import qualms

    print(qualms.__version__)
    ```
"""
