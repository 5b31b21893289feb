"use strict";
// Draws figures with uPlot: shared zoom and cursor, smoothing, logarithmic axes, stacked areas and
// bands for standard errors. Values come from page.js; texts are inserted as text nodes.
const Figures = (() => {
  const COLORS = 8;
  const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  const FAINT = "55"; // hexadecimal alpha of the raw line if a smoothed line is shown too
  const HEIGHT = 230;
  const view = { smoothing: 0, isLog: false, x: "step", hidden: new Set(), range: null };
  let runs = [];
  let grid = null; // all values on the horizontal axis, and the indices of each run's records
  let cards = [];
  let isApplying = false;

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = (number) => css(`--c${number % COLORS}`);

  function placesOf(run) {
    if (view.x === "step") return run.steps;
    const seconds = run.metrics["time_s/step"];
    let sum = 0;
    const of = new Map((seconds?.at ?? run.steps.map((_, i) => i)).map((at, k) => [at, seconds?.v[k]]));
    return run.steps.map((_, i) => (sum += (of.get(i) ?? 0) / 3600));
  }

  function makeGrid() {
    const places = runs.map(placesOf);
    const xs = [...new Set(places.flat())].sort((a, b) => a - b);
    const index = new Map(xs.map((x, i) => [x, i]));
    return { xs, at: places.map((of) => of.map((x) => index.get(x))) };
  }

  // undefined: the step has no record, and the line continues; null: not finite, and the line has a gap.
  function valuesOf(number, metric) {
    const column = runs[number].metrics[metric];
    if (!column) return null;
    const found = new Array(grid.xs.length);
    const at = grid.at[number];
    for (let k = 0; k < column.v.length; k++) found[at[column.at ? column.at[k] : k]] = column.v[k];
    return found;
  }

  // Exponential moving average with bias correction (Kingma and Ba 2014, sec. 3).
  function smooth(values, rate) {
    let mean = 0, weight = 0;
    return values.map((value) => {
      if (value == null) return value;
      mean = rate * mean + (1 - rate) * value;
      weight = rate * weight + (1 - rate);
      return mean / weight;
    });
  }

  const shown = () => runs.map((_, number) => number).filter((n) => !view.hidden.has(runs[n].label));
  const isWorthIt = (column, plot) => column?.v.some((v) => v != null && (v !== 0 || !plot.nonzero));

  function number(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2);
    return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
  }

  function tick(value) {
    const size = Math.abs(value);
    // As many digits as the value has; 4 hide the rounding of sums such as 0.0001 + 0.00005.
    if (size >= 1e9 || (size !== 0 && size < 1e-3)) return Number(value.toPrecision(4)).toExponential().replace("e+", "e");
    if (size >= 1e6) return `${value / 1e6}M`;
    if (size >= 1e4) return `${value / 1e3}k`;
    return String(Number(value.toPrecision(6)));
  }

  // Returns a figure's lines: uPlot series, their values, and bands between lines.
  function linesOf(plot, isLog) {
    const found = { series: [], data: [grid.xs], bands: [], stacked: null };
    const add = (values, options) => {
      const safe = isLog ? values.map((v) => (v != null && v <= 0 ? null : v)) : values;
      found.data.push(safe);
      found.series.push({ value: (_, v) => number(v), points: { size: 5 }, width: 1.5, ...options });
      return found.data.length - 1;
    };
    const numbers = shown();
    plot.series.forEach((one, metric) => {
      for (const run of numbers) {
        const raw = valuesOf(run, one.metric);
        if (!raw) continue;
        const isAlone = plot.series.length === 1;
        const stroke = color(isAlone ? run : metric);
        const dash = isAlone ? [] : DASHES[run % DASHES.length];
        const names = isAlone && runs.length > 1 ? [] : [one.label];
        const label = [...names, ...(runs.length > 1 ? [runs[run].label] : [])].join(", ");
        const errors = one.error && valuesOf(run, one.error);
        if (errors) {
          const moved = (sign) => raw.map((v, i) => (v == null || errors[i] == null ? v : v + sign * errors[i]));
          const helper = { class: "helper", stroke: "transparent", width: 0, points: { show: false }, label };
          const pair = [add(moved(1), helper), add(moved(-1), helper)];
          found.bands.push({ series: pair, fill: stroke + "33" });
        }
        if (view.smoothing > 0 && !errors) { // values with standard errors are not smoothed
          add(raw, { class: "helper", stroke: stroke + FAINT, dash, width: 1, label });
          add(smooth(raw, view.smoothing), { stroke, dash, label });
        } else {
          const given = errors ? { value: (_, v, s, i) => (i == null || v == null ? "–" : `${number(v)} ± ${number(errors[i])}`) } : {};
          add(raw, { stroke, dash, label, ...given });
        }
      }
    });
    for (const run of plot.levels ? numbers : []) {
      Object.entries(runs[run].levels[plot.levels] ?? {}).forEach(([name, height], i) => {
        const label = `planned, ${name}` + (runs.length > 1 ? `, ${runs[run].label}` : "");
        add(grid.xs.map(() => height), { stroke: css("--ink"), dash: DASHES[1 + (i % 3)], label, points: { show: false } });
      });
    }
    return found;
  }

  // Returns stacked areas, the first at the bottom; the highest is drawn first.
  function stackOf(plot, run) {
    const layers = [];
    plot.series.forEach((one, metric) => {
      const raw = valuesOf(run, one.metric);
      if (raw) layers.push({ label: one.label, values: raw, fill: color(metric) });
    });
    // If a step recorded only some parts (no token had a certain age), the missing parts are 0.
    for (const layer of layers) {
      layer.values = layer.values.map((v, i) => (v === undefined && layers.some((other) => other.values[i] !== undefined) ? 0 : v));
    }
    const whole = plot.whole && valuesOf(run, plot.whole);
    if (whole) {
      const rest = whole.map((all, i) => {
        if (all == null) return all;
        return Math.max(0, all - layers.reduce((sum, layer) => sum + (layer.values[i] ?? 0), 0));
      });
      layers.push({ label: "rest", values: rest, fill: css("--rest") });
    }
    const sums = new Array(grid.xs.length).fill(0);
    for (const layer of layers) {
      if (view.smoothing > 0) layer.values = smooth(layer.values, view.smoothing);
      layer.tops = layer.values.map((v, i) => (v == null ? v : (sums[i] += v)));
    }
    layers.reverse();
    return {
      data: [grid.xs, ...layers.map((layer) => layer.tops)],
      bands: [],
      series: layers.map((layer) => ({
        label: layer.label, fill: layer.fill, stroke: layer.fill, width: 1, points: { show: false },
        value: (_, v, s, i) => (i == null ? "–" : number(layer.values[i])),
      })),
    };
  }

  function heights(plot, isLog) {
    if (isLog) return { distr: 3 };
    return {
      range: (_, low, high) => {
        if (low == null) return [0, 1];
        if (plot.zero || plot.kind === "stack") return [Math.min(0, low), high > 0 ? high * 1.05 : 1];
        const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
        return [low - room, high + room];
      },
    };
  }

  function share(range) {
    if (isApplying) return;
    isApplying = true;
    const ends = grid.xs.length ? [grid.xs[0], grid.xs[grid.xs.length - 1]] : [0, 1];
    const isWhole = range[0] <= ends[0] && range[1] >= ends[1];
    view.range = isWhole ? null : range;
    for (const card of cards) card.chart?.setScale("x", { min: range[0], max: range[1] });
    document.body.classList.toggle("zoomed", !isWhole);
    isApplying = false;
  }

  // Returns the width of a vertical axis on which the longest number fits.
  function room(_, texts) {
    return Math.max(48, 16 + 7.5 * Math.max(0, ...(texts ?? []).map((text) => text.length)));
  }

  function options(card, lines, width) {
    const ink = css("--muted"), line = css("--line");
    const isLog = card.isLog();
    const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
    let isReady = false;
    setTimeout(() => (isReady = true));
    return {
      width, height: HEIGHT,
      cursor: {
        y: false,
        drag: { x: true, y: false },
        sync: { key: "steps", setSeries: false, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      },
      scales: { x: { time: false }, y: heights(card.plot, isLog) },
      axes: [
        { ...axis, size: 32, values: (_, ticks) => ticks.map(tick), incrs: view.x === "step" ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6] : undefined },
        { ...axis, size: room, values: (_, ticks) => ticks.map((v) => (v == null ? "" : tick(v))) },
      ],
      series: [{ label: view.x === "step" ? "step" : "hours", value: (_, v) => (v == null ? "–" : number(v)) }, ...lines.series],
      bands: lines.bands,
      legend: { markers: { dash: (chart, i) => (chart.series[i].dash?.length ? "dashed" : "solid") } },
      hooks: {
        setScale: [(chart, key) => key === "x" && isReady && share([chart.scales.x.min, chart.scales.x.max])],
      },
    };
  }

  class Card {
    constructor(plot, run) {
      this.plot = plot;
      this.run = run; // the run that a stack shows
      this.chart = null;
      this.ownLog = plot.log;
      this.place = document.createElement("div");
      this.place.className = "chart";
      const title = document.createElement("h3");
      title.textContent = plot.title + (run != null && runs.length > 1 ? `, ${runs[run].label}` : "");
      const unit = document.createElement("span");
      unit.className = "unit";
      unit.textContent = plot.unit;
      const head = document.createElement("header");
      head.append(title, unit);
      if (plot.kind !== "stack") head.append(this.button("log", () => { this.ownLog = !this.ownLog; this.draw(); }));
      head.append(this.button("wide", () => { this.node.classList.toggle("wide"); this.draw(); }));
      this.node = document.createElement("figure");
      this.node.dataset.title = plot.title.toLowerCase() + " " + plot.series.map((one) => one.metric).join(" ").toLowerCase();
      this.node.append(head, this.place);
    }

    button(text, act) {
      const found = document.createElement("button");
      found.type = "button";
      found.textContent = text;
      found.setAttribute("aria-label", `${text}: ${this.plot.title}`);
      found.addEventListener("click", act);
      return found;
    }

    isLog() {
      return this.plot.kind !== "stack" && (view.isLog || this.ownLog);
    }

    draw() {
      this.chart?.destroy();
      this.chart = null;
      this.node.classList.toggle("log", this.isLog());
      const lines = this.plot.kind === "stack" ? stackOf(this.plot, this.run) : linesOf(this.plot, this.isLog());
      const width = this.place.clientWidth;
      if (!width || !lines.series.length) return;
      isApplying = true;
      this.chart = new uPlot(options(this, lines, width), lines.data, this.place);
      if (view.range) this.chart.setScale("x", { min: view.range[0], max: view.range[1] });
      isApplying = false;
    }
  }

  const isNear = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const card = cards.find((one) => one.node === entry.target);
      if (entry.isIntersecting && card && !card.chart) card.draw();
    }
  }, { rootMargin: "200px" });

  const hasNewSize = new ResizeObserver((entries) => {
    for (const entry of entries) {
      const card = cards.find((one) => one.place === entry.target);
      const width = Math.floor(entry.contentRect.width);
      if (card?.chart && width && width !== card.chart.width) card.chart.setSize({ width, height: HEIGHT });
    }
  });

  const redraw = () => cards.forEach((card) => card.chart && card.draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  return {
    view, number, color,
    // Replaces the data of all runs, and discards all figures.
    begin(found) {
      cards.forEach((card) => card.chart?.destroy());
      isNear.disconnect();
      hasNewSize.disconnect();
      cards = [];
      runs = found;
      grid = makeGrid();
    },
    // Returns the elements of a figure: none without data, one per run for stacks, and one per
    // metric if there are several runs, because colours then distinguish runs.
    make(plot) {
      const series = plot.series.filter((one) => runs.some((run) => isWorthIt(run.metrics[one.metric], plot)));
      if (!series.length) return [];
      if (runs.length > 1 && series.length > 1 && plot.kind !== "stack") {
        return series.flatMap((one) => this.make({ ...plot, title: `${plot.title}: ${one.label}`, series: [one] }));
      }
      const of = { ...plot, series };
      const has = (run) => series.some((one) => run.metrics[one.metric]);
      const made = plot.kind === "stack" ? runs.flatMap((run, n) => (has(run) ? [new Card(of, n)] : [])) : [new Card(of, null)];
      for (const card of made) {
        cards.push(card);
        isNear.observe(card.node);
        hasNewSize.observe(card.place);
      }
      return made.map((card) => card.node);
    },
    // Redraws the figures after a change of the view.
    change(values) {
      const wasX = view.x;
      Object.assign(view, values);
      if (view.x !== wasX) {
        view.range = null;
        grid = makeGrid();
        document.body.classList.remove("zoomed");
      }
      for (const card of cards) {
        if (card.run != null) card.node.hidden = view.hidden.has(runs[card.run].label);
      }
      redraw();
    },
    reset() {
      share(grid.xs.length ? [grid.xs[0], grid.xs[grid.xs.length - 1]] : [0, 1]);
    },
    count: () => cards.length,
    drawn: () => cards.filter((card) => card.chart).length,
    charts: () => cards.map((card) => card.chart),
  };
})();
