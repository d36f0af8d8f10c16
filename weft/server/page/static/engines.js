// Several engines behind one server (--dp-size): each in small, and one of them large.

import { $, button, el, num, take, used } from "./parts.js";

const shown = new Map(); // buttons by rank
export let rank = null; // of the one that is shown: first the first that is seen

export function clear() {
	shown.clear();
	$("engines").replaceChildren();
}

// Returns whether this picture is of the engine that is shown. `chosen` is called when that changes.
export function show({ rank: seen, stats }, chosen) {
	rank ??= seen;
	if (!shown.has(seen)) add(seen, chosen);
	const [words, pool] = shown.get(seen).children;
	words.textContent = `${num(stats.num_running)} running, ${num(stats.num_waiting)} waiting · KV ${Math.round(100 * used(stats))} %`;
	take(pool.firstChild, used(stats));
	return seen === rank;
}

function add(seen, chosen) {
	const choice = button(`Engine ${seen}`, () => {
		rank = seen;
		mark();
		chosen();
	}, "");
	choice.append(el("small"), el("span", "pool", el("i", "c-decode")));
	shown.set(seen, choice);
	mark();
	const ranks = [...shown.keys()].sort((a, b) => a - b);
	$("engines").replaceChildren(...ranks.map((one) => shown.get(one)));
	$("engines").hidden = ranks.length < 2;
}

function mark() {
	for (const [one, choice] of shown) choice.ariaPressed = one === rank;
}
