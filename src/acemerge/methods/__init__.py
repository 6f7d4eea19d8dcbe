"""Merging methods, one file each. A file put in this package, or an entry point in `acemerge.methods`, is all it takes."""

from acemerge.methods.registry import Context, Merged, Method, Options, all_methods, get_method, method

__all__ = ["Context", "Merged", "Method", "Options", "all_methods", "get_method", "method"]
