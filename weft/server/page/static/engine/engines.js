// Several engines of one server (--dp-size): each as a small tile, one of them in full.

import { $, bar, button, el, listOf, num, put, used } from "../parts.js";

const AWAY_MS = 3000; // time without a picture
const latest = new Map(); // pictures by rank, each with its last tree
let change = null; // called when another engine is chosen
let rank = null; // of the engine shown in full: at first, the first seen
const draw = listOf($("engines"), make, fill);

export const onChange = (act) => { change = act; };

export const shown = () => latest.get(rank);

export function clear() {
	latest.clear();
	draw([]);
}

// Returns whether this picture is of the engine that is shown.
export function show(picture) {
	rank ??= picture.rank;
	latest.set(picture.rank, { ...latest.get(picture.rank), ...picture, seenAt: performance.now() });
	draw([...latest.keys()]);
	$("engines").hidden = latest.size < 2;
	return picture.rank === rank;
}

function make(of) {
	const choice = button(`Engine ${of}`, () => {
		rank = of;
		draw([...latest.keys()]);
		change();
	});
	choice.append(el("small"), el("span", "pool"));
	choice.style.order = of;
	return choice;
}

function fill(choice, i, of) {
	const { stats, seenAt } = latest.get(of);
	const [words, pool] = choice.children;
	const isAway = performance.now() - seenAt > AWAY_MS;
	const load = `${num(stats.num_running)} running, ${num(stats.num_waiting)} waiting · KV ${Math.round(100 * used(stats))} %`;
	put(words, isAway ? "does not answer" : load);
	bar(pool, { decode: used(stats) });
	choice.ariaPressed = of === rank;
}
