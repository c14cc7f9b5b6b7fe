"""Files behind a URL, through fsspec: object stores, the Hub, or another folder."""
