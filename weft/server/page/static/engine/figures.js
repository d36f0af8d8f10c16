// The figures at the top. Rates are differences of counters, as in Prometheus.

import { $, el, put, short, used } from "../parts.js";

const SPAN_S = 3; // span of rates
const KEPT_S = 60; // span of hits and curves
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
	const curve = $("curve").content.firstChild.cloneNode(true);
	$("figures").append(el("div", "panel c-" + shade, el("dt", "", title), value, curve));
	return { value, curve: curve.firstChild, points: [] };
});
let past = [];

export function clear() {
	past = [];
	for (const tile of tiles) tile.points = [];
}

// A picture of a recording contains its own history.
export function show(picture) {
	if (picture.before) clear();
	[...(picture.before || []), picture].forEach(note);
}

function note({ at_s: at, stats }) {
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
	const top = unit === "%" ? 100 : Math.max(...tile.points.map((point) => point[1]), 1);
	// The present is at 0; the style sheet rotates the curve by 180°.
	const places = tile.points.map(([when, one]) => [((at - when) / KEPT_S).toFixed(3), (one / top).toFixed(2)]);
	tile.curve.setAttribute("points", places.join(" "));
}

export function words(stats) {
	const [output, , hits] = tiles.map((tile) => tile.value.textContent);
	return `${stats.num_running} running, ${stats.num_waiting} waiting, ${output} output tokens a second, ${hits} of the prompts cached`;
}
