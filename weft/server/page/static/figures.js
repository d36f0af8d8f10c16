// The figures at the top. Rates are differences of counters, as Prometheus would take them.

import { $, clear as empty, colour, el, put, short, used } from "./parts.js";

const SPAN_S = 3; // of rates
const KEPT_S = 60; // of hits and curves
const TITLES = [
	["Output tokens/s", "decode"],
	["Prompt tokens/s", "prefill"],
	["Cache hits", "cached"],
	["Running", "decode"],
	["Waiting", "warn"],
	["KV in use", "cached"],
];

const tiles = TITLES.map(([title, shade]) => {
	const value = el("dd", "", "0", el("small"));
	const curve = el("canvas");
	curve.ariaHidden = true;
	$("figures").append(el("div", "panel", el("dt", "", title), value, curve));
	return { value, curve, shade, points: [] };
});
let past = [];

export function clear() {
	past = [];
	for (const tile of tiles) tile.points = [];
}

export function show(at, stats) {
	const last = past.at(-1);
	if (last && (at < last.at || stats.total_steps < last.stats.total_steps)) clear();
	past.push({ at, stats });
	while (past.length > 2 && at - past[1].at > KEPT_S) past.shift();
	const near = past.find((one) => at - one.at <= SPAN_S);
	const passed = at - near.at || Infinity;
	const rate = (name) => (stats[name] - near.stats[name]) / passed;
	const first = past[0].stats;
	let prompts = stats.total_prompt_tokens - first.total_prompt_tokens;
	let cached = stats.total_cached_tokens - first.total_cached_tokens;
	if (!prompts) [prompts, cached] = [stats.total_prompt_tokens, stats.total_cached_tokens];
	const values = [
		[rate("total_generated_tokens")],
		[rate("total_prompt_tokens")],
		[prompts ? (100 * cached) / prompts : 0, "%"],
		[stats.num_running, `of ${stats.max_running_requests}`],
		[stats.num_waiting],
		[100 * used(stats), "%"],
	];
	values.forEach(([value, unit], i) => set(tiles[i], at, value, unit));
}

function set(tile, at, value, unit = "") {
	put(tile.value.firstChild, unit === "%" ? value.toFixed(0) : short(value));
	put(tile.value.lastChild, unit);
	tile.points.push([at, value]);
	while (at - tile.points[0][0] > KEPT_S) tile.points.shift();
	const [drawing, width, height] = empty(tile.curve);
	const top = unit === "%" ? 100 : Math.max(...tile.points.map((point) => point[1]), 1);
	drawing.strokeStyle = colour(tile.shade);
	drawing.lineWidth = 1.5;
	for (const [when, one] of tile.points) {
		drawing.lineTo(width - ((at - when) / KEPT_S) * width, height - 2 - Math.min(one / top, 1) * (height - 4));
	}
	drawing.stroke();
}

export function words(stats) {
	const [output, , hits] = tiles.map((tile) => tile.value.textContent);
	return `${stats.num_running} running, ${stats.num_waiting} waiting, ${output} output tokens a second, ${hits} of the prompts cached`;
}
