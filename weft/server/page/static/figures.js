// The figures at the top: what Grafana's dashboard shows of the last minutes, here of the last
// seconds. Rates are differences of counters, as Prometheus would take them.

import { $, clear, colour, el, short } from "./parts.js";

const SPAN_S = 3; // of rates
const KEPT_S = 60; // of hits, and of the small curves

export class Figures {
	constructor() {
		this.past = [];
		this.tiles = {};
		this.tile("out", "Output tokens/s", "decode");
		this.tile("in", "Prompt tokens/s", "prefill");
		this.tile("hits", "Cache hits", "cached");
		this.tile("running", "Running", "decode");
		this.tile("waiting", "Waiting", "warn");
		this.tile("memory", "KV in use", "cached");
	}

	tile(name, title, shade) {
		const box = el("div");
		const value = el("dd");
		const curve = el("canvas");
		curve.setAttribute("aria-hidden", "true");
		box.append(el("dt", "", title), value, curve);
		$("figures").append(box);
		this.tiles[name] = { value, curve, shade, points: [] };
	}

	clear() {
		this.past = [];
		for (const tile of Object.values(this.tiles)) tile.points = [];
	}

	show(at, stats) {
		const past = this.past;
		if (past.length && (at < past[past.length - 1].at || stats.total_steps < past[past.length - 1].stats.total_steps)) this.clear();
		this.past.push({ at, stats });
		while (this.past.length > 2 && at - this.past[1].at > KEPT_S) this.past.shift();
		const near = this.past.find((one) => at - one.at <= SPAN_S) || this.past[0];
		const passed = Math.max(at - near.at, 1e-3);
		const rate = (name) => (near.at === at ? 0 : (stats[name] - near.stats[name]) / passed);
		const first = this.past[0].stats;
		let prompts = stats.total_prompt_tokens - first.total_prompt_tokens;
		let cached = stats.total_cached_tokens - first.total_cached_tokens;
		if (!prompts) [prompts, cached] = [stats.total_prompt_tokens, stats.total_cached_tokens];
		const hits = prompts ? (100 * cached) / prompts : 0;
		const used = (100 * stats.kv_used) / Math.max(stats.kv_tokens, 1);
		this.set("out", at, rate("total_generated_tokens"), "");
		this.set("in", at, rate("total_prompt_tokens"), "");
		this.set("hits", at, hits, "%");
		this.set("running", at, stats.num_running, `of ${stats.max_running_requests}`);
		this.set("waiting", at, stats.num_waiting, "");
		this.set("memory", at, used, "%");
	}

	set(name, at, value, unit) {
		const tile = this.tiles[name];
		tile.value.textContent = unit === "%" ? value.toFixed(0) : short(Math.round(value * 10) / 10);
		if (unit) tile.value.append(el("small", "", unit));
		tile.points.push([at, value]);
		while (tile.points.length && at - tile.points[0][0] > KEPT_S) tile.points.shift();
		this.draw(tile, at, unit);
	}

	draw(tile, at, unit) {
		const [drawing, width, height] = clear(tile.curve);
		const top = unit === "%" ? 100 : Math.max(...tile.points.map((point) => point[1]), 1);
		drawing.strokeStyle = colour(tile.shade);
		drawing.lineWidth = 1.5;
		drawing.lineJoin = "round";
		drawing.beginPath();
		tile.points.forEach(([when, value], i) => {
			const x = width - ((at - when) / KEPT_S) * width;
			const y = height - 2 - (Math.min(value / top, 1)) * (height - 4);
			if (i) drawing.lineTo(x, y);
			else drawing.moveTo(x, y);
		});
		drawing.stroke();
	}

	words(stats) {
		return `${stats.num_running} running, ${stats.num_waiting} waiting, ` +
			`${this.tiles.out.value.textContent} output tokens a second, ${this.tiles.hits.value.textContent} of the prompts cached`;
	}
}
