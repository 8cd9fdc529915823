"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const figures = read("figures"), palette = read("palette");
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const asked = new URLSearchParams(location.hash.slice(1)).get("theme");
  let choice = ["light", "dark"].includes(asked) ? asked : "auto";
  const theme = () => (choice === "auto" ? (system.matches ? "dark" : "light") : choice);
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // Colours of paper, text and scales belong to the theme, not to the figure.
  function dressed(figure) {
    const { data, layout, frames } = structuredClone(figure);
    const ink = css("--ink"), soft = css("--soft"), grid = css("--grid"), panel = css("--panel");
    const scale = (name) => palette[name][theme()].map((color, i, all) => [i / (all.length - 1), color]);
    for (const trace of data) {
      if (typeof trace.colorscale === "string") trace.colorscale = scale(trace.colorscale);
      if (trace.colorbar) Object.assign(trace.colorbar, { tickfont: { color: soft, size: 11 }, title: { ...trace.colorbar.title, font: { color: soft, size: 12 } } });
      if (trace.type === "bar") trace.textfont = { color: ink };
      if (trace.mode && trace.mode.includes("text")) trace.textfont = { color: ink, size: 11 };
    }
    const axis = (given) => Object.assign({ gridcolor: grid, linecolor: grid, tickfont: { color: soft }, ticks: "" }, given,
      given && given.title ? { title: { text: given.title.text, font: { color: soft, size: 12.5 }, standoff: 10 } } : {});
    layout.xaxis = axis(layout.xaxis);
    layout.yaxis = axis(layout.yaxis);
    for (const shape of layout.shapes || []) if (shape.line.color === "muted") Object.assign(shape, { opacity: 0.65, line: { ...shape.line, color: soft } });
    for (const note of layout.annotations || []) note.font = { size: 11, color: soft };
    for (const slider of layout.sliders || [])
      Object.assign(slider, { bgcolor: grid, bordercolor: grid, activebgcolor: css("--accent"), tickcolor: grid, font: { color: soft, size: 10.5 } });
    Object.assign(layout, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true, colorway: palette.series,
      font: { family: css("--sans"), color: ink, size: 12.5 },
      margin: Object.assign({ l: 56, r: 18, t: 30, b: 44 }, layout.margin),
      hoverlabel: { bgcolor: panel, bordercolor: grid, font: { color: ink, family: css("--sans") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: css("--accent") },
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { color: soft, size: 12 } },
    });
    if ((layout.annotations || []).some((note) => note.yref === "y domain") && layout.showlegend) layout.legend.y = 1.09;
    if (layout.showlegend) layout.margin.t = Math.max(layout.margin.t, 48 + 12 * Math.floor(data.length / 6));
    return { data, layout, frames };
  }

  const options = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtons: [["toImage", "resetScale2d"]] };
  async function draw() {
    root.dataset.theme = theme();
    button.textContent = "theme: " + choice;
    for (const [key, figure] of Object.entries(figures)) {
      const place = document.getElementById(key);
      if (!place) continue;
      const { data, layout, frames } = dressed(figure);
      // A new plot instead of an update: animation frames are otherwise added twice.
      if (place.data) Plotly.purge(place);
      await Plotly.newPlot(place, data, layout, options);
      if (frames) await Plotly.addFrames(place, frames);
    }
    root.dataset.drawn = String(Object.keys(figures).length);
  }
  button.addEventListener("click", () => { choice = { auto: "light", light: "dark", dark: "auto" }[choice]; draw(); });
  system.addEventListener("change", () => { if (choice === "auto") draw(); });
  draw();
})();
