// Running and waiting requests: a bar per request with a row, a reason per request without.

import { $, bar, button, el, hue, join, listOf, num, plural, put, span, tell } from "../parts.js";
import * as story from "./story.js";

const MANY = 14;
const BACKGROUND = "background"; // class of requests that get what others leave

export const mine = new Set(); // names of this page's requests
let rows = null;
let queue = null;

export function show(picture) {
	const stats = picture.stats;
	rows = picture.rows;
	const prompts = rows.decoding.filter((is) => !is).length;
	const computed = prompts && `${plural(prompts, "prompt")} being computed`;
	tell("rows-text", join(`${num(rows.rid.length)} of ${num(stats.max_running_requests)} rows`, computed));
	$("rows").classList.toggle("many", rows.rid.length > MANY);
	lanes(rows.rid);
}

export function wait(picture) {
	const stats = picture.stats;
	queue = picture.queue;
	const tokens = stats.num_waiting ? ` with ${num(stats.num_waiting_tokens)} prompt tokens` : "";
	tell("queue-text", join(
		plural(stats.num_waiting, "request") + tokens,
		stats.num_waiting > queue.rid.length && `the first ${queue.rid.length} that came`,
		picture.paused && `generation is paused (${picture.paused})`,
		picture.input === "blocked" && "the input is blocked",
	));
	lines(queue.rid);
}

function row(rid, kind, ...parts) {
	const made = button("", () => story.open(rid), "row " + kind);
	made.append(el("span", "rid", rid), ...parts, el("span", "so"));
	return el("li", "", made);
}

const lane = (rid) => row(rid, "lane", el("span", "pool"));

function fill(item, i) {
	const box = item.firstChild;
	const [, pool, told] = box.children;
	const [prompt, output, isDecoding] = [rows.prompt[i], rows.output[i], rows.decoding[i]];
	const most = Math.max(rows.max[i], prompt + output, 1);
	const cached = Math.min(rows.cached[i], prompt);
	const done = isDecoding ? prompt : Math.min(rows.computed[i], prompt);
	bar(pool, { cached: cached / most, prefill: Math.max(done - cached, 0) / most, decode: output / most });
	box.style.setProperty("--hue", hue(rows.tenant[i]));
	box.classList.toggle("mine", mine.has(rows.rid[i]));
	box.classList.toggle(BACKGROUND, rows.service[i] === BACKGROUND);
	const missed = rows.missed[i] ? rows.cause[i] : ""; // of a prompt that was not cached as far as it could be
	const progress = isDecoding ? `${num(output)} of ${num(most - prompt)}` : `prompt ${num(done)} of ${num(rows.fill[i])}`;
	const said = join(missed, progress);
	if (told.textContent === said) return;
	told.textContent = said;
	const service = rows.service[i] === BACKGROUND ? " (background)" : "";
	box.title = join(
		`${rows.rid[i]}${service}: ${progress} tokens, ${num(cached)} of ${num(prompt)} prompt tokens cached, ${span(rows.age[i])}`,
		missed && `${missed}: ${plural(rows.missed[i], "token")} computed again`,
	);
}

const line = (rid) => row(rid, "", el("span", "why"));

function entry(item, i) {
	const box = item.firstChild;
	const [, why, age] = box.children;
	box.classList.toggle(BACKGROUND, queue.service[i] === BACKGROUND);
	put(why, queue.why[i]);
	why.title = queue.why[i];
	put(age, span(queue.age[i]));
}

const lanes = listOf($("rows"), lane, fill, "Nothing runs. Ask something.");
const lines = listOf($("queue"), line, entry, "Nobody waits.");
