// Draws a stretch of the lease timeline on a canvas, and says what is where. Knows a tile; asks for nothing.

import { colour, duration } from "./words.js";

const GUTTER = 118, TOP = 6, BOTTOM = 24, ROW = 24, TALL = 44, FEW = 10, GAP = 7;
const HARMLESS = new Set(["late", "duplicate"]);

export class Lanes {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.tile = null;
    this.frames = 0;
  }

  get row() { return (this.tile?.nodes.length ?? 0) <= FEW ? TALL : ROW; }
  get bar() { return this.row - GAP; }
  get gutter() { return this.canvas.clientWidth < 560 ? 64 : GUTTER; }
  get room() { return Math.max(50, this.canvas.clientWidth - this.gutter); } // pixels for time

  use(tile) {
    this.tile = tile;
    this.rows = new Map(tile.nodes.map((node, i) => [node, i]));
    this.names = new Map(tile.lives.map(([node, name]) => [node, name]));
    const height = `${TOP + Math.max(1, tile.nodes.length) * this.row + BOTTOM}px`;
    if (this.canvas.style.height !== height) this.canvas.style.height = height;
  }

  timeAt(x, view) { return view.from + ((x - this.gutter) / this.room) * (view.to - view.from); }
  place(at, view) { return this.gutter + ((at - view.from) / (view.to - view.from)) * this.room; }

  draw(view, chosen) {
    const { canvas, context, tile } = this, scale = devicePixelRatio;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    this.frames++;
    if (!tile) return;
    context.save();
    context.beginPath();
    context.rect(this.gutter, 0, this.room, height);
    context.clip();
    if (tile.bars) this.drawBars(view, chosen); else if (tile.image) this.drawPicture(view);
    this.drawDeaths(view);
    context.restore();
    this.drawNames(width);
    this.drawAxis(view, width, height);
  }

  drawPicture(view) {
    const { context, tile } = this, pitch = tile.row_pixels + tile.gap_pixels;
    const left = this.place(tile.from_s, view), right = this.place(tile.to_s, view);
    context.imageSmoothingEnabled = false;
    tile.nodes.forEach((node, i) => {
      context.drawImage(tile.image, 0, i * pitch, tile.image.width, tile.row_pixels, left, TOP + i * this.row + 3, right - left, this.bar);
    });
  }

  drawBars(view, chosen) {
    const { context, tile } = this, { bars, gaps, versions } = tile;
    const colours = tile.parts.map((part) => tile.kinds[part][0]);
    context.fillStyle = `${tile.kinds.idle[0]}66`;
    for (const [node, from, to] of gaps) this.box(view, node, from, to, 5);
    const drawn = this.drawn = [];
    bars.at_s.forEach((at, i) => {
      if (at[6] < view.from || at[0] > view.to) return;
      drawn.push(i);
      for (let part = 0; part < 6; part++) {
        if (at[part + 1] <= at[part]) continue;
        context.fillStyle = colours[part];
        this.box(view, bars.node[i], at[part], at[part + 1]);
      }
      if (bars.refused[i]) this.strike(view, bars.node[i], at, HARMLESS.has(bars.refused[i]), tile.kinds.refused[0]);
      if (bars.lease[i] === chosen) this.frame(view, bars.node[i], at);
    });
    if (versions.length && this.room / Math.max(1, versions.length) > 3) {
      context.strokeStyle = colour("quiet");
      context.globalAlpha = 0.45;
      context.beginPath();
      for (const [, at] of versions) {
        const x = Math.round(this.place(at, view)) + 0.5;
        context.moveTo(x, TOP);
        context.lineTo(x, TOP + tile.nodes.length * this.row);
      }
      context.stroke();
      context.globalAlpha = 1;
    }
  }

  top(node) { return TOP + (this.rows.get(node) ?? -9) * this.row + 3; }

  box(view, node, from, to, inset = 0) {
    const left = this.place(from, view);
    this.context.fillRect(left, this.top(node) + inset, Math.max(0.75, this.place(to, view) - left), this.bar - 2 * inset);
  }

  frame(view, node, at) {
    const left = this.place(at[0], view);
    this.context.strokeStyle = colour("ink");
    this.context.lineWidth = 2;
    this.context.strokeRect(left, this.top(node) - 1, Math.max(2, this.place(at[6], view) - left), this.bar + 2);
    this.context.lineWidth = 1;
  }

  // Hatched: somebody else had computed the same. Crossed: it was refused.
  strike(view, node, at, isHarmless, red) {
    const { context } = this, left = this.place(at[0], view), right = Math.max(left + 3, this.place(at[6], view)), top = this.top(node);
    context.strokeStyle = isHarmless ? colour("card") : red;
    context.lineWidth = isHarmless ? 1.5 : 2;
    context.beginPath();
    if (isHarmless) {
      for (let x = left; x < right; x += 6) { context.moveTo(x, top + this.bar); context.lineTo(Math.min(right, x + 6), top); }
    } else {
      context.moveTo(left, top); context.lineTo(right, top + this.bar);
      context.moveTo(left, top + this.bar); context.lineTo(right, top);
    }
    context.stroke();
    context.lineWidth = 1;
  }

  drawDeaths(view) {
    const { context, tile } = this;
    context.font = "bold 14px system-ui";
    context.textAlign = "center";
    context.fillStyle = tile.kinds.refused[0];
    for (const [node, , , left, why] of tile.lives) {
      if (left === null || left < view.from || left > view.to || why === "the run is over") continue;
      context.fillText("✕", this.place(left, view), this.top(node) + this.bar / 2 + 5);
    }
  }

  drawNames(width) {
    const { context, tile } = this;
    context.font = "12px system-ui";
    context.textAlign = "right";
    tile.nodes.forEach((node, i) => {
      context.fillStyle = colour("ink");
      const name = this.gutter < GUTTER ? String(node) : `${node} ${this.names.get(node) || ""}`;
      context.fillText(name.length > 16 ? `${name.slice(0, 15)}…` : name, this.gutter - 8, TOP + i * this.row + this.row / 2 + 4);
      context.fillStyle = colour("grid");
      context.fillRect(0, TOP + (i + 1) * this.row - 1, width, 1);
    });
  }

  drawAxis(view, width, height) {
    const { context } = this;
    const span = view.to - view.from, rough = span / Math.max(2, this.room / 110), power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step)));
    context.font = "12px system-ui";
    context.textAlign = "center";
    context.fillStyle = colour("quiet");
    for (let at = Math.ceil(view.from / step) * step; at <= view.to; at += step) {
      const x = this.place(at, view);
      if (x > this.gutter + 14 && x < width - 26) context.fillText(`${at.toFixed(Math.min(digits, 5))} s`, x, height - 7);
    }
  }

  // What is under this point: a lease, why there is none, or, from afar, how many.
  at(x, y, view) {
    const { tile } = this;
    const node = tile?.nodes[Math.floor((y - TOP) / this.row)];
    if (node === undefined || x < this.gutter) return null;
    const time = this.timeAt(x, view), near = (2 / this.room) * (view.to - view.from);
    if (!tile.bars) return { words: `node ${node} ${this.names.get(node) || ""}\nclick to come closer` };
    let best = null, distance = Infinity;
    for (const i of this.drawn || []) {
      const at = tile.bars.at_s[i];
      if (tile.bars.node[i] !== node || time < at[0] - near || time > at[6] + near) continue;
      const off = Math.abs((at[0] + at[6]) / 2 - time);
      if (off < distance) { best = i; distance = off; }
    }
    if (best !== null) return { bar: best };
    const gap = tile.gaps.find(([whose, from, to]) => whose === node && time >= from && time <= to);
    return gap ? { words: `node ${node}: idle for ${duration(gap[2] - gap[1])}\n${gap[3]}` } : null;
  }
}
