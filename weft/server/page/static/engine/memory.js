// Memory by owner as a bar, and a thin bar per other store.

import { $, bar, el, num, put, sum, tell } from "../parts.js";

const MOST_PINS = 8; // listed
const OWNERS = { requests: "decode", cached: "cached", pinned: "pinned", "out of use": "bad", free: "line" };
const COLOURS = Object.values(OWNERS);

const pool = el("div", "pool");
const legend = el("ul", "legend");
const meters = el("div", "meters");
const pinned = el("ul", "pins");
pool.role = "img";
pinned.ariaLabel = "Pinned prompts";
$("memory").append(pool, legend, meters, pinned);
for (const [name, colour] of Object.entries(OWNERS)) legend.append(el("li", "c-" + colour, name + " ", el("b")));

export function show({ stats, owners, stores, pins }) {
	const counts = Object.values(owners);
	const whole = Math.max(sum(counts), 1);
	bar(pool, Object.fromEntries(counts.map((count, i) => [COLOURS[i], count / whole])));
	counts.forEach((count, i) => {
		const line = legend.children[i];
		put(line.lastChild, num(count));
		line.hidden = COLOURS[i] === "bad" && !count;
	});
	tell("memory-text", `KV of ${num(stats.kv_tokens)} tokens`);
	pool.ariaLabel = Object.entries(owners).map(([name, count]) => `${name} ${num(count)}`).join(", ") + " tokens";
	meters.replaceChildren(...stores.map(store));
	// The last used pin is at the top.
	pinned.replaceChildren(...pins.slice(-MOST_PINS).reverse().map(pin));
}

const pin = ({ name, state, words }) => el("li", state === "firm" ? "c-pinned" : "c-warn", el("bdi", "", name), el("small", "", words));

function store({ words, share }) {
	const line = el("div", "", words);
	if (share !== null) line.append(bar(el("div", "pool"), { decode: share }));
	return line;
}
