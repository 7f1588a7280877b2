"""Pages link to files outside of docs, which are not part of the site: those links lead to
the repository instead."""

import os
import re

REPOSITORY = "https://github.com/leasedmutex/leased/"
OUTSIDE = re.compile(r"\]\((\.\./[^)\s#]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown, page, config, files):
    def to_repository(match):
        path, heading = match.group(1), match.group(2) or ""
        path = os.path.normpath(os.path.join("docs", path))
        kind = "tree" if os.path.isdir(os.path.join(config["docs_dir"], "..", path)) else "blob"
        return f"]({REPOSITORY}{kind}/main/{path}{heading})"

    return OUTSIDE.sub(to_repository, markdown)
