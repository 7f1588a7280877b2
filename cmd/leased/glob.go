package main

import "strings"

// globQuote escapes text so that it matches only itself in a pattern of Redis.
func globQuote(text string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`, `]`, `\]`).Replace(text)
}

// globMatch reports whether name matches a pattern as Redis would match it. Redis itself is asked
// with a broader pattern, because in keys other text follows the name.
func globMatch(pattern, name string) bool {
	for pattern != "" {
		switch pattern[0] {
		case '*':
			rest := strings.TrimLeft(pattern, "*")
			if rest == "" {
				return true
			}
			for i := range len(name) + 1 {
				if globMatch(rest, name[i:]) {
					return true
				}
			}
			return false
		case '?':
			if name == "" {
				return false
			}
			pattern, name = pattern[1:], name[1:]
		case '[':
			if name == "" {
				return false
			}
			rest, in := globClass(pattern[1:], name[0])
			if !in {
				return false
			}
			pattern, name = rest, name[1:]
		default:
			if pattern[0] == '\\' && len(pattern) > 1 {
				pattern = pattern[1:]
			}
			if name == "" || pattern[0] != name[0] {
				return false
			}
			pattern, name = pattern[1:], name[1:]
		}
	}
	return name == ""
}

// globClass reports whether c is in the class at the start of pattern, whose opening bracket has
// been removed, and returns what follows the class.
func globClass(pattern string, c byte) (rest string, in bool) {
	negated := strings.HasPrefix(pattern, "^")
	if negated {
		pattern = pattern[1:]
	}
	for pattern != "" && pattern[0] != ']' {
		switch {
		case pattern[0] == '\\' && len(pattern) > 1:
			in = in || pattern[1] == c
			pattern = pattern[2:]
		case len(pattern) > 2 && pattern[1] == '-':
			low, high := min(pattern[0], pattern[2]), max(pattern[0], pattern[2])
			in = in || low <= c && c <= high
			pattern = pattern[3:]
		default:
			in = in || pattern[0] == c
			pattern = pattern[1:]
		}
	}
	return strings.TrimPrefix(pattern, "]"), in != negated
}
