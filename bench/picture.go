package main

import (
	"bytes"
	"errors"
	"fmt"
	"image/color"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// paint is a color on a light page, and the color that replaces it on a dark one.
type paint struct{ light, dark color.RGBA }

func rgb(hex uint32) color.RGBA {
	return color.RGBA{uint8(hex >> 16), uint8(hex >> 8), uint8(hex), 255}
}

// The drawing library knows one color for each thing, so it draws for light pages; svg then lets
// the browser choose.
var (
	card  = paint{rgb(0xFFFFFF), rgb(0x161B22)}
	ink   = paint{rgb(0x1F2328), rgb(0xE6EDF3)}
	faint = paint{rgb(0x59636E), rgb(0x9198A1)}
	grid  = paint{rgb(0xE1E4E8), rgb(0x2D333B)}

	lines = map[string]paint{
		ours:          {rgb(0x0969DA), rgb(0x4493F8)},
		"rueidislock": {rgb(0xBC4C00), rgb(0xF0883E)},
		"redislock":   {rgb(0x8250DF), rgb(0xAB7DF8)},
		"redsync":     {rgb(0x1A7F37), rgb(0x3FB950)},
		"etcd":        {rgb(0xBF3989), rgb(0xDB61A2)},
		"Redisson":    {rgb(0x9A6700), rgb(0xD29922)},
	}
	floors = paint{rgb(0x8C959F), rgb(0x6E7681)}

	shapes = map[string]draw.GlyphDrawer{
		ours: draw.CircleGlyph{}, "rueidislock": draw.SquareGlyph{}, "redislock": draw.TriangleGlyph{},
		"redsync": draw.PyramidGlyph{}, "etcd": draw.CrossGlyph{}, "Redisson": draw.BoxGlyph{},
	}
)

func lineOf(c contender) paint {
	if c.floor {
		return floors
	}
	return lines[c.name]
}

func shapeOf(c contender) draw.GlyphStyle {
	s := draw.GlyphStyle{Color: lineOf(c).light, Radius: 3, Shape: draw.RingGlyph{}}
	if shape, ok := shapes[c.name]; ok {
		s.Shape = shape
	}
	if c.name == ours {
		s.Radius = 4
	}
	return s
}

// pictures draws what was measured into a directory. The name of a picture never changes.
func (r *report) pictures(dir string) error {
	save := func(name string, draw func() ([]byte, error)) error {
		picture, err := draw()
		if err != nil {
			return err
		}
		return os.WriteFile(filepath.Join(dir, name), picture, 0o644)
	}
	var errs []error
	if slices.ContainsFunc(growths, func(g growth) bool { return len(r.sizes(g)) > 0 }) {
		errs = append(errs, save("performance-growth.svg", r.growthPicture))
	}
	if r.compares() {
		errs = append(errs, save("performance-peers.svg", r.peersPicture))
	}
	return errors.Join(errs...)
}

// sheet returns a plot in our colors, with logarithmic scales on request.
func sheet(title, across, up string) *plot.Plot {
	p := plot.New()
	p.BackgroundColor = card.light
	p.Title.Text, p.X.Label.Text, p.Y.Label.Text = title, across, up
	p.Title.Padding = 6
	for _, text := range []*draw.TextStyle{&p.Title.TextStyle, &p.X.Label.TextStyle, &p.Y.Label.TextStyle, &p.X.Tick.Label, &p.Y.Tick.Label, &p.Legend.TextStyle} {
		text.Font.Typeface, text.Font.Variant, text.Font.Size = "Liberation", "Sans", 11
		text.Color = faint.light
	}
	p.Title.TextStyle.Color, p.Title.TextStyle.Font.Size = ink.light, 13
	p.Legend.TextStyle.Color = ink.light
	for _, axis := range []*plot.Axis{&p.X, &p.Y} {
		axis.Color, axis.Tick.Color = faint.light, faint.light
		axis.Padding = 4
		axis.Tick.Length = 5
	}
	return p
}

func logarithmic(axis *plot.Axis) {
	axis.Scale, axis.Tick.Marker = plot.LogScale{}, plot.TickerFunc(powers)
}

// powers has a label at each power of ten, and none between.
func powers(least, most float64) []plot.Tick {
	var ticks []plot.Tick
	for e := math.Floor(math.Log10(least)); e <= math.Ceil(math.Log10(most)); e++ {
		v := math.Pow(10, e)
		label := number(v)
		if e < -2 {
			label = fmt.Sprintf("%g", v)
		}
		ticks = append(ticks, plot.Tick{Value: v, Label: label})
	}
	return ticks
}

func lattice() *plotter.Grid {
	g := plotter.NewGrid()
	g.Horizontal.Color, g.Vertical.Color = grid.light, grid.light
	return g
}

// growthPicture has a panel for each growth.
func (r *report) growthPicture() ([]byte, error) {
	panels := make([]*plot.Plot, len(growths))
	var shown []contender
	for i, g := range growths {
		p := sheet(g.title, g.across, g.up)
		p.Add(lattice())
		least, most := math.Inf(1), 0.0
		for _, c := range contenders {
			var points plotter.XYs
			for _, n := range r.sizes(g) {
				// A value too small for the server's clock to show has no place on this scale.
				if value, ok := r.at(g.name, c.name, g.figure, n); ok && value > 0 {
					points = append(points, plotter.XY{X: float64(n), Y: value * g.scale})
					least, most = min(least, value*g.scale), max(most, value*g.scale)
				}
			}
			if len(points) == 0 {
				continue
			}
			line, glyphs, err := plotter.NewLinePoints(points)
			if err != nil {
				return nil, err
			}
			line.Color, line.Width, glyphs.GlyphStyle = lineOf(c).light, 1.5, shapeOf(c)
			if c.floor {
				line.Dashes = []vg.Length{4, 3}
			}
			if c.name == ours {
				line.Width = 2.5
			}
			p.Add(line, glyphs)
			if !slices.ContainsFunc(shown, func(s contender) bool { return s.name == c.name }) {
				shown = append(shown, c)
			}
		}
		if most > 0 {
			logarithmic(&p.X)
			logarithmic(&p.Y)
			p.X.Min, p.X.Max = 1, math.Pow(10, math.Ceil(math.Log10(p.X.Max)))
			p.Y.Min, p.Y.Max = math.Pow(10, math.Floor(math.Log10(least))), math.Pow(10, math.Ceil(math.Log10(most*1.001)))
		}
		panels[i] = p
	}
	const width, height, legend = 1000, 330, 30
	canvas := vgsvg.New(width, height)
	all := draw.New(canvas)
	all.FillPolygon(card.light, corners(all.Rectangle))
	tiles := draw.Tiles{Rows: 1, Cols: len(panels), PadX: 22, PadTop: 10, PadBottom: 8 + legend, PadLeft: 10, PadRight: 16}
	for i, p := range panels {
		p.Draw(tiles.At(all, i, 0))
	}
	legendLine(all, shown)
	return svg(canvas, "How cost grows with waiters, with locks and with processes")
}

func corners(r vg.Rectangle) []vg.Point {
	return []vg.Point{r.Min, {X: r.Max.X, Y: r.Min.Y}, r.Max, {X: r.Min.X, Y: r.Max.Y}}
}

// legendLine draws the legend of the lines, below the panels.
func legendLine(c draw.Canvas, shown []contender) {
	style := sheet("", "", "").Legend.TextStyle
	style.XAlign, style.YAlign = draw.XLeft, draw.YCenter
	width := vg.Length(0)
	name := func(c contender) string {
		if c.floor {
			return c.name + " (floor)"
		}
		return c.name
	}
	const mark, gap = 26, 26
	for _, one := range shown {
		width += mark + style.Width(name(one)) + gap
	}
	x, y := c.Center().X-(width-gap)/2, vg.Length(18)
	for _, one := range shown {
		line := draw.LineStyle{Color: lineOf(one).light, Width: 1.5}
		if one.floor {
			line.Dashes = []vg.Length{4, 3}
		}
		c.StrokeLine2(line, x, y, x+mark-6, y)
		c.DrawGlyphNoClip(shapeOf(one), vg.Point{X: x + (mark-6)/2, Y: y})
		c.FillText(style, vg.Point{X: x + mark, Y: y}, name(one))
		x += mark + style.Width(name(one)) + gap
	}
}

// peersPicture shows what each contender costs as a multiple of the floor.
func (r *report) peersPicture() ([]byte, error) {
	p := sheet("What it costs, as a multiple of the least it could", "times the floor; 1 is the floor itself", "")
	p.Add(lattice())
	var compared []row
	for _, line := range rows {
		if line.floor != "" && (line.rate || line.figure == "p50") {
			compared = append(compared, line)
		}
	}
	least, most := 0.5, 2.0
	var shown []contender
	for _, c := range contenders {
		var points plotter.XYs
		for i, line := range compared {
			if ratio := median(r.against(line, c.name)); !c.floor && !math.IsNaN(ratio) && ratio > 0 {
				points = append(points, plotter.XY{X: ratio, Y: float64(len(compared) - i)})
				least, most = min(least, ratio), max(most, ratio)
			}
		}
		if len(points) == 0 {
			continue
		}
		glyphs, err := plotter.NewScatter(points)
		if err != nil {
			return nil, err
		}
		glyphs.GlyphStyle = shapeOf(c)
		glyphs.Radius++
		p.Add(glyphs)
		shown = append(shown, c)
	}
	one, err := plotter.NewLine(plotter.XYs{{X: 1, Y: 0.5}, {X: 1, Y: float64(len(compared)) + 0.5}})
	if err != nil {
		return nil, err
	}
	one.Color, one.Dashes = faint.light, []vg.Length{4, 3}
	p.Add(one)
	logarithmic(&p.X)
	p.X.Min, p.X.Max = math.Pow(10, math.Floor(math.Log10(least))), math.Pow(10, math.Ceil(math.Log10(most)))
	p.Y.Min, p.Y.Max = 0.5, float64(len(compared))+0.5
	var ticks []plot.Tick
	for i, line := range compared {
		label, _, _ := strings.Cut(line.title, ":")
		ticks = append(ticks, plot.Tick{Value: float64(len(compared) - i), Label: label + " / " + line.floor})
	}
	p.Y.Tick.Marker = plot.ConstantTicks(ticks)
	p.Y.Tick.Label.Color = ink.light
	// Leave room for a reader's font that is wider than the one with which the drawing library measures.
	p.Y.Tick.Length, p.Y.Tick.Color, p.Y.Color = 44, card.light, grid.light
	const width, height, legend = 900, 420, 30
	canvas := vgsvg.New(width, height)
	all := draw.New(canvas)
	all.FillPolygon(card.light, corners(all.Rectangle))
	p.Draw(draw.Crop(all, 10, -20, 8+legend, -10))
	legendLine(all, shown)
	return svg(canvas, p.Title.Text)
}

// svg returns the text of a picture, with colors that follow the reader's settings, in a font as wide as
// the one with which it was measured. The text depends on nothing but what was drawn.
func svg(canvas *vgsvg.Canvas, title string) ([]byte, error) {
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, err
	}
	text := b.String()
	paints := []paint{card, ink, faint, grid, floors}
	for _, c := range contenders {
		if p, ok := lines[c.name]; ok {
			paints = append(paints, p)
		}
	}
	light, dark := "", ""
	for i, p := range paints {
		name := fmt.Sprintf("--c%d", i)
		text = strings.ReplaceAll(text, hex(p.light), "var("+name+")")
		light += name + ":" + hex(p.light) + ";"
		dark += name + ":" + hex(p.dark) + ";"
	}
	text = strings.ReplaceAll(text, "font-family:Liberation Sans;", `font-family:'Liberation Sans',Arial,Helvetica,sans-serif;`)
	text = strings.ReplaceAll(text, "font-variant:normal;font-weight:normal;font-style:normal;", "")
	head, body, found := strings.Cut(text, "xmlns:xlink=\"http://www.w3.org/1999/xlink\">\n")
	if !found {
		return nil, errors.New("the drawing library writes another head than it did")
	}
	_, head, _ = strings.Cut(head, "<svg")
	return fmt.Appendf(nil, "<svg%srole=\"img\">\n<title>%s</title>\n<style>\n  svg { %s }\n  @media (prefers-color-scheme: dark) { svg { %s } }\n</style>\n%s",
		head, title, light, dark, body), nil
}

func hex(c color.RGBA) string { return fmt.Sprintf("#%02X%02X%02X", c.R, c.G, c.B) }
