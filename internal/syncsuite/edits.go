package syncsuite

import (
	"fmt"
	"go/ast"
	"go/token"
	"path"
	"slices"
	"strconv"
	"strings"
)

// edits are changes to a text, by position, so that all else stays to the letter.
type edits struct {
	set  *token.FileSet
	list []edit
}

type edit struct {
	from, to int
	text     string
}

func (e *edits) add(from, to token.Pos, text string) {
	e.list = append(e.list, edit{e.set.Position(from).Offset, e.set.Position(to).Offset, text})
}

func (e *edits) remove(from, to token.Pos)     { e.add(from, to, "") }
func (e *edits) replace(n ast.Node, by string) { e.add(n.Pos(), n.End(), by) }

func (e *edits) removeDecl(d ast.Decl) {
	from := d.Pos()
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Doc != nil {
			from = d.Doc.Pos()
		}
	case *ast.GenDecl:
		if d.Doc != nil {
			from = d.Doc.Pos()
		}
	}
	e.remove(from, d.End())
}

// imports redirects and removes imports as [Adapt] says.
func (e *edits) imports(file *ast.File, kept []ast.Decl) error {
	names := used(kept)
	dot := false
	for _, s := range file.Imports {
		p := importPath(s)
		name := path.Base(p)
		if s.Name != nil {
			name = s.Name.Name
		}
		if name != "." && name != "_" && !names[name] {
			e.remove(s.Pos(), s.End())
			continue
		}
		if by, ok := replaced[p]; ok {
			if s.Name == nil {
				by = name + " " + strconv.Quote(by)
			} else {
				by = strconv.Quote(by)
			}
			e.replace(s.Path, by)
			dot = dot || p == "sync" && name == "."
		} else if strings.HasPrefix(p, "internal/") || strings.Contains(p, "/internal/") {
			return fmt.Errorf("imports %s, which nobody but Go may", p)
		}
	}
	if !dot {
		return fmt.Errorf("does not import sync as a dot")
	}
	return nil
}

func (e *edits) apply(code []byte) []byte {
	slices.SortFunc(e.list, func(a, b edit) int { return a.from - b.from })
	var out []byte
	at := 0
	for _, x := range e.list {
		out = append(out, code[at:x.from]...)
		out = append(out, x.text...)
		at = x.to
	}
	return append(out, code[at:]...)
}
