// One chart: uPlot with this page's colours; zoom by dragging, pan with shift, back by a double click. Knows no runs.

import { colour, dash, hue, number } from "./words.js";

const all = new Set();

export class Chart {
  // `looked(from, to)` is called when somebody looks closer, and with nulls when they look at all of it again.
  constructor(place, { title, height = 300, stacked = false, legend = true, fromZero = false, looked = null, values = number }) {
    this.place = place;
    place.classList.add("chart");
    place.setAttribute("role", "img");
    place.setAttribute("aria-label", title);
    place.style.minHeight = `${height}px`; // nothing moves when it is filled
    this.given = { height, stacked, legend, fromZero, looked, values };
    this.empty = document.createElement("div");
    this.empty.className = "empty";
    this.empty.textContent = "nothing yet";
    place.append(this.empty);
    this.isLog = false;
    this.zoom = null;
    this.plot = null;
    this.names = "";
    this.observer = new ResizeObserver(() => this.fit());
    this.observer.observe(place);
    all.add(this);
  }

  // `curves`: [{name, x, y, colour?, fill?, edge?}], each with its own x; two edges, in a row, are a band. `axis`: what x is.
  show(curves, axis = "") {
    this.curves = curves;
    this.axis = axis;
    const filled = curves.filter((curve) => curve.x.length);
    this.empty.hidden = filled.length > 0;
    const last = filled[0]?.x;
    this.place.dataset.last = last ? String(last[last.length - 1]) : "";
    if (!filled.length) { this.plot?.destroy(); this.plot = null; return; }
    let data = filled.length === 1 ? [filled[0].x, filled[0].y] : uPlot.join(filled.map((curve) => [curve.x, curve.y]));
    if (this.given.stacked) data = piled(data);
    const names = JSON.stringify([filled.map((curve) => [curve.name, curve.edge, curve.colour]), axis, this.isLog]);
    if (this.plot && names === this.names) {
      this.isFilling = true;
      this.plot.setData(data, !this.zoom);
      if (this.zoom) this.plot.setScale("x", this.zoom);
      this.isFilling = false;
      return;
    }
    this.names = names;
    this.plot?.destroy();
    this.plot = new uPlot(this.options(filled), data, this.place);
    if (this.zoom) this.plot.setScale("x", this.zoom);
  }

  options(curves) {
    const given = this.given, ink = colour("quiet"), grid = { stroke: colour("grid"), width: 1 };
    const axis = { stroke: ink, grid, ticks: { show: false }, font: "12px system-ui", labelFont: "12px system-ui", labelSize: 18 };
    const series = curves.map((curve, i) => ({
      label: curve.name,
      stroke: curve.colour || hue(i),
      width: curve.edge ? 0 : 1.8,
      class: curve.edge ? "edge" : undefined,
      dash: dash(i),
      fill: given.stacked || curve.fill ? `${curve.colour || hue(i)}${given.stacked ? "cc" : "22"}` : undefined,
      points: { show: curve.edge ? false : (plot, at) => plot.data[at].length < 40, size: 5 },
      value: (plot, value, at, index) => given.values(given.stacked && index !== null ? peeled(plot.data, at, index) : value),
      spanGaps: true,
    }));
    return {
      width: this.place.clientWidth || 300,
      height: this.room(),
      padding: [10, 24, 0, 0],
      cursor: { drag: { x: true, y: false }, focus: { prox: 24 }, points: { size: 6 } },
      legend: { show: given.legend, live: true },
      scales: { x: { time: false }, y: this.isLog ? { distr: 3 } : { range: (plot, low, high) => bounds(low, high, given.stacked || given.fromZero) } },
      bands: curves.flatMap((curve, i) => (curve.edge && curves[i + 1]?.edge ? [{ series: [i + 1, i + 2], fill: `${curve.colour || hue(i)}44` }] : [])),
      axes: [{ ...axis, size: 26, label: this.axis || undefined, values: (plot, ticks) => ticks.map((tick) => number(tick)) },
        { ...axis, size: 58, values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : given.values(tick))) }],
      series: [{ label: this.axis, value: (plot, value) => number(value, 6) }, ...series],
      hooks: { setScale: [(plot, key) => key === "x" && this.scaled(plot)], ready: [(plot) => this.panning(plot)] },
    };
  }

  room() { return Math.max(90, this.given.height - (this.given.legend ? 32 : 0)); }
  fit() { if (this.plot && this.place.clientWidth) this.plot.setSize({ width: this.place.clientWidth, height: this.room() }); }
  redraw() { this.names = ""; if (this.curves) this.show(this.curves, this.axis); }
  close() { this.observer.disconnect(); this.plot?.destroy(); all.delete(this); }
  setLog(isLog) { this.isLog = isLog; this.redraw(); }

  scaled(plot) {
    if (this.isFilling || !plot.data[0].length) return;
    const { min, max } = plot.scales.x, xs = plot.data[0];
    if (min === null || max === null) return;
    const isAll = min <= xs[0] && max >= xs[xs.length - 1];
    const before = this.zoom;
    this.zoom = isAll ? null : { min, max };
    clearTimeout(this.timer);
    if (this.given.looked && (before || this.zoom)) {
      this.timer = setTimeout(() => this.given.looked(this.zoom?.min ?? null, this.zoom?.max ?? null), 150);
    }
  }

  panning(plot) {
    plot.over.addEventListener("dblclick", () => { this.zoom = null; this.given.looked?.(null, null); });
    plot.over.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
      event.preventDefault();
      const { min, max } = plot.scales.x, width = max - min;
      if (event.shiftKey) {
        const xs = plot.data[0], wish = width * (event.deltaY + event.deltaX) / 800;
        const by = Math.max(xs[0] - min, Math.min(xs[xs.length - 1] - max, wish));
        plot.setScale("x", { min: min + by, max: max + by });
      } else {
        const at = plot.posToVal(event.offsetX, "x"), factor = Math.exp(event.deltaY / 400);
        plot.setScale("x", { min: at - (at - min) * factor, max: at + (max - at) * factor });
      }
    }, { passive: false });
  }
}

export function redrawAll() { for (const chart of all) chart.redraw(); }

function bounds(low, high, isFromZero) {
  if (low === null || high === null) return [0, 1];
  if (isFromZero || (low >= 0 && low < 0.4 * high)) low = 0;
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low === 0 ? 0 : low - room, high + room];
}

// One on top of the other; the first one drawn is the whole pile.
function piled(data) {
  const [x, ...ys] = data;
  const sums = new Array(x.length).fill(0);
  const found = [...ys].reverse().map((y) => y.map((value, i) => (sums[i] += value || 0)));
  return [x, ...found.reverse()];
}

const peeled = (data, at, index) => (data[at]?.[index] ?? 0) - (data[at + 1]?.[index] ?? 0);

// The mean of what came before, older ones counting less and less.
export function smoothed(values, part) {
  if (!part) return values;
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : part * mean + (1 - part) * value;
    return mean;
  });
}
