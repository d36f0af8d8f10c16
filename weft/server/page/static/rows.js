// Who runs and who waits: a bar for each request that has a row, and the reason for each that has
// none. With many, the bars become cells.

import { $, brief, button, el, hue, num, plural, span } from "./parts.js";

const MANY = 14;

export class Rows {
	constructor(open) {
		this.list = $("rows");
		this.queue = $("queue");
		this.open = open; // shows the story of a request
		this.mine = new Set(); // names of requests of this page
		this.lanes = new Map();
		this.waiting = new Map();
	}

	show(picture) {
		this.rows(picture.rows, picture.stats);
		this.wait(picture.queue, picture.stats, picture);
	}

	rows(rows, stats) {
		const most = stats.max_running_requests;
		const prompts = rows.decoding.filter((is) => !is).length;
		let words = `${num(rows.rid.length)} of ${num(most)} rows`;
		if (prompts) words += ` · ${plural(prompts, "prompt")} being computed`;
		$("rows-text").textContent = words;
		this.list.classList.toggle("many", rows.rid.length > MANY);
		const kept = new Set();
		rows.rid.forEach((rid, i) => {
			kept.add(rid);
			let lane = this.lanes.get(rid);
			if (!lane) {
				lane = this.lane(rid);
				this.lanes.set(rid, lane);
				this.list.append(lane.item);
			}
			this.fill(lane, rows, i);
		});
		sweep(this.lanes, kept);
		this.none(this.list, rows.rid.length, "Nothing runs. Ask something, and watch it here.");
	}

	lane(rid) {
		const item = el("li");
		const lane = button("", () => this.open(rid), "lane");
		const bar = el("span", "bar");
		const parts = ["k", "f", "d"].map((kind) => bar.appendChild(el("i", kind)));
		const said = el("span", "so");
		lane.append(el("span", "rid", brief(rid)), bar, said);
		item.append(lane);
		return { item, button: lane, parts, said };
	}

	fill(lane, rows, i) {
		const prompt = rows.prompt[i];
		const output = rows.output[i];
		const most = Math.max(rows.max[i], prompt + output, 1);
		const cached = Math.min(rows.cached[i], prompt);
		const done = rows.decoding[i] ? prompt : Math.min(rows.computed[i], prompt);
		const widths = [cached / most, Math.max(done - cached, 0) / most, output / most];
		widths.forEach((share, k) => lane.parts[k].style.setProperty("--p", share.toFixed(4)));
		lane.button.style.setProperty("--hue", hue(rows.tenant[i]));
		lane.button.classList.toggle("mine", this.mine.has(rows.rid[i]));
		const said = rows.decoding[i] ? `${num(output)} of ${num(most - prompt)}` : `prompt ${num(done)} of ${num(rows.fill[i])}`;
		if (lane.said.textContent !== said) {
			lane.said.textContent = said;
			const words = `${rows.rid[i]}: ${said} tokens, ${num(cached)} of ${num(prompt)} prompt tokens cached, ${span(rows.age[i])}`;
			lane.button.title = words;
			lane.button.setAttribute("aria-label", words);
		}
	}

	wait(queue, stats, picture) {
		const held = [];
		if (picture.paused) held.push(`generation is paused (${picture.paused})`);
		if (picture.input === "blocked") held.push("the input is blocked");
		let words = plural(stats.num_waiting, "request");
		if (stats.num_waiting) words += ` with ${num(stats.num_waiting_tokens)} prompt tokens`;
		if (stats.num_waiting > queue.rid.length) words += ` · the first ${queue.rid.length} that came`;
		$("queue-text").textContent = [words, ...held].join(" · ");
		const kept = new Set();
		queue.rid.forEach((rid, i) => {
			kept.add(rid);
			let line = this.waiting.get(rid);
			if (!line) {
				line = { item: el("li"), why: el("span", "why"), said: el("span", "so") };
				const row = button("", () => this.open(rid), "");
				row.append(el("span", "rid", brief(rid)), line.why, line.said);
				line.item.append(row);
				this.waiting.set(rid, line);
				this.queue.append(line.item);
			}
			line.why.textContent = line.why.title = queue.why[i];
			line.said.textContent = span(queue.age[i]);
		});
		sweep(this.waiting, kept);
		this.none(this.queue, queue.rid.length, "Nobody waits.");
	}

	none(list, count, words) {
		const there = list.querySelector(".none");
		if (!count && !there) list.append(el("li", "none", words));
		if (count && there) there.remove();
	}
}

function sweep(shown, kept) {
	for (const [rid, one] of shown) {
		if (kept.has(rid)) continue;
		one.item.remove();
		shown.delete(rid);
	}
}
